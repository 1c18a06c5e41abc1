"""What every test may ask for."""

pytest_plugins = ["tests.support.features", "tests.support.fixtures_apiserver"]
