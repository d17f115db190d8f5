"""A hub on this machine: `python -m tests.fakes.hub FOLDER KNOBS`, and `running_hub` for tests."""
