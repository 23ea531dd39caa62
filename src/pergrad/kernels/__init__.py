"""Where rules hand over to the machine: the fused contraction, and loops over examples that are spread over devices."""

from .contraction import batched_contraction as batched_contraction
