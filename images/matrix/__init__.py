"""build_matrix.yaml as cells, what rules out a cell, and the text of its files. Imports no other group."""
