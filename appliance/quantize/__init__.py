"""Quantizes an unquantized model once, and measures what was lost. No start whose file is made already imports it."""
