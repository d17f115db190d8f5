"""Preview a start for `appliance plan`: what it would serve, without starting anything."""
