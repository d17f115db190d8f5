"""The models as clients see them: slots, their documents, the listening gateway, and the order of a stop."""
