"""What made an answer: its speed beside the profile, its energy, and what slowed it down."""
