"""One model served by several hosts together: the leader plans, is asked, and tells the others what to start."""
