"""The build half: from build_matrix.yaml to images that are proven to hold what they promise."""
