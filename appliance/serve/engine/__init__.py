"""The steps that bring a served model's engine up: prove kernels, choose a plan or measure, load."""
