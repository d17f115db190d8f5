"""Models by shape: GGUF files of any published size that cost nothing, and small ones that the real engine runs.

path = write_gguf(tmp_path / "m.gguf", PUBLISHED["gpt-oss-120b"], quantization="MXFP4")  # a hole of 63 GB
path = write_gguf(tmp_path / "m.gguf", SMALL["delta-net"], quantization="Q4_K_M", with_data=True)
"""

from __future__ import annotations

from appliance.model.shapes.shape import Shape
from tests.shapes.shape import PUBLISHED, SMALL
from tests.shapes.write import QUANTIZATIONS, write_gguf

__all__ = ["PUBLISHED", "QUANTIZATIONS", "SMALL", "Shape", "write_gguf"]
