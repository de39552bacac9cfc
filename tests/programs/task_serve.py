"""Opens the port given as its argument, as TensorFlow's server does, and waits."""

import socket
import sys
import time

server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
server.bind(("", int(sys.argv[1])))
server.listen()
while True:
    time.sleep(60)
