"""Expert placement: what a token of a mixture of experts costs, and which experts are kept on the GPU."""
