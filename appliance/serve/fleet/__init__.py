"""The models of one container: which there are, how each is planned beside the others, and how clients reach them."""
