"""The abilities of a served model here: a dozen exchanges with its engine, and what they showed."""

from appliance.abilities.record import Abilities, Ability, Result, digest_of, dump_abilities, parse_abilities

__all__ = ["Abilities", "Ability", "Result", "digest_of", "dump_abilities", "parse_abilities"]
