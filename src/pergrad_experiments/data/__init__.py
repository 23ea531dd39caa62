"""Data sets: fetched by package name and checked (`fetch`), read (`images`, `text`), and put into batches (`loader`)."""
