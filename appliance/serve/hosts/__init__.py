"""One model served by several hosts together: the leader plans, takes requests, and tells the others what to start."""
