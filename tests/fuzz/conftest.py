"""The long run is only for who names it (`make fuzz`, or `pytest tests/fuzz`): `pytest tests` passes it by."""


def pytest_ignore_collect(collection_path, config):
    return None if any("fuzz" in str(argument) for argument in config.args) else True
