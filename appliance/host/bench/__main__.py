"""python -m appliance.host.bench [URL]"""

import sys

from appliance.host.bench import DESCRIPTION, add_arguments, run
from appliance.host.standalone import main

if __name__ == "__main__":
    sys.exit(main("appliance bench", DESCRIPTION, add_arguments, run))
