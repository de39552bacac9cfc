#!/bin/sh
# make_keys [FOLDER…]: makes the keys of a cluster of containers, once, in the volume /keys, for its user `trainer`.
# What follows are other volumes that are to belong to that user. Run as root, which may give them away.
set -eu
umask 077
cd /keys
[ -e host_key ] || ssh-keygen -q -t ed25519 -N '' -C distlaunch-node -f host_key
[ -e id_ed25519 ] || ssh-keygen -q -t ed25519 -N '' -C distlaunch-controller -f id_ed25519
cp id_ed25519.pub authorized_keys
# Every node has the same host key. Nothing but this cluster is reached with this file, so it stands for all names.
echo "* $(cat host_key.pub)" > known_hosts
chown trainer: /keys /keys/* "$@"

# What distlaunch on the host needs, for whoever owns the folder there.
if [ -d /keys_on_host ]; then
  install -m 600 -o "$(stat -c %u /keys_on_host)" -g "$(stat -c %g /keys_on_host)" id_ed25519 known_hosts /keys_on_host
fi
