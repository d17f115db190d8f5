"""python -m tests.fakes.toy VERB …: the appliance as it is, with one engine more on its path."""

from pathlib import Path

from appliance import engines
from appliance.__main__ import main

engines.__path__.append(str(Path(__file__).parent / "engines"))
raise SystemExit(main())
