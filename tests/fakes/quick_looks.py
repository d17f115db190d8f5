"""python -m tests.fakes.quick_looks VERB …: the appliance as it is, looking at its engine's memory twice a second."""

from appliance.__main__ import main
from appliance.serve.background import memory_watch

memory_watch.LOOK_EVERY_S = 0.5
raise SystemExit(main())
