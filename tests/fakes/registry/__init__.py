"""A container registry on this machine: `python -m tests.fakes.registry FOLDER KNOBS`, and `running_registry`."""
