#!/bin/sh
# make_keys [FOLDER…]: makes the keys of a cluster of containers, once, in the volume /keys, for the user `trainer`.
# The FOLDERs are other volumes, which it gives to that user. It must run as root.
set -eu
umask 077
cd /keys
[ -e host_key ] || ssh-keygen -q -t ed25519 -N '' -C distlaunch-node -f host_key
[ -e id_ed25519 ] || ssh-keygen -q -t ed25519 -N '' -C distlaunch-controller -f id_ed25519
cp id_ed25519.pub authorized_keys
# All nodes have the same host key. This file is only used for this cluster, so the key is valid for every name.
echo "* $(cat host_key.pub)" > known_hosts
chown trainer: /keys /keys/* "$@"

# The files that distlaunch needs on the host, given to the owner of the folder there.
if [ -d /keys_on_host ]; then
  install -m 600 -o "$(stat -c %u /keys_on_host)" -g "$(stat -c %g /keys_on_host)" id_ed25519 known_hosts /keys_on_host
fi
