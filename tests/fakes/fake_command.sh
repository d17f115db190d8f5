#!/bin/sh
# In the place of a command: writes what it was called with to $CALLS, and says what the file $SAYS/NAME.out holds. It
# says NAME.said on stderr, and fails where NAME.err is, with those words. NAME is the command's; of `python -m images VERB` it is images-VERB,
# and of `docker VERB` docker-VERB where there is such a file.
name=${0##*/}
[ "$name" != docker ] || ! ls "$SAYS/docker-$1".* >/dev/null 2>&1 || name=docker-$1
[ "$name $1 $2" != "python -m images" ] || name=images-$3
echo "${APPLIANCE_IMAGE:+APPLIANCE_IMAGE=$APPLIANCE_IMAGE }${APPLIANCE_MODEL:+APPLIANCE_MODEL=$APPLIANCE_MODEL }${0##*/} $*" >>"$CALLS"
[ ! -f "$SAYS/$name.err" ] || { cat "$SAYS/$name.err" >&2; exit 1; }
[ ! -f "$SAYS/$name.said" ] || cat "$SAYS/$name.said" >&2
[ ! -f "$SAYS/$name.out" ] || cat "$SAYS/$name.out"
