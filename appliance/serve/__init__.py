"""Step 6: serve a model, from the first look at the machine to the last request. `run` tells the story: read it
first."""
