"""Expert placement: the cost of a token in a mixture of experts, and the choice of experts that stay on the GPU."""
