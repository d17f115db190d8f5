"""python -m appliance.host.inject TOOL"""

import sys

from appliance.host.inject import DESCRIPTION, add_arguments, run
from appliance.host.standalone import main

if __name__ == "__main__":
    sys.exit(main("appliance inject", DESCRIPTION, add_arguments, run))
