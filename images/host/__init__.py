"""What the host command takes from the build half: an inventory as data, and a wheel of its own."""
