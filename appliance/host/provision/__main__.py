"""python3 -m appliance.host.provision [secrets|check FOLDER]"""

import sys

from appliance.host.provision.verb import DESCRIPTION, add_arguments, run
from appliance.host.standalone import main

if __name__ == "__main__":
    sys.exit(main("python3 -m appliance.host.provision", DESCRIPTION, add_arguments, run))
