"""python -m tests.fakes.never_busy VERB …: the appliance as it is, measuring whatever else the machine does."""

from appliance.__main__ import main
from appliance.serve.model import courtesy

courtesy.LOOKS = 0
raise SystemExit(main())
