"""Plans that people have read, and a test compares."""
