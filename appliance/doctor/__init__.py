"""`appliance doctor`: checks everything that a start depends on in one pass; shows what was seen and what to do."""

from appliance.doctor.bundle import bundle, write_bundle
from appliance.doctor.check import Check
from appliance.doctor.examine import Findings, examine
from appliance.doctor.show import as_json, show

__all__ = ["Check", "Findings", "as_json", "bundle", "examine", "show", "write_bundle"]
