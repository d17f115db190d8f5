"""`appliance inject`: enters the appliance in the settings of editors and other tools. README.md says what is
written."""

from appliance.host.inject.verb import DESCRIPTION, add_arguments, run

__all__ = ["DESCRIPTION", "add_arguments", "run"]
