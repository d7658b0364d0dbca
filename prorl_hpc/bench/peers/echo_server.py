"""``echo_server.py SOCKET``, inside a container started by hand: ten lines that answer what they are told."""

import socket
import sys

server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("ready", flush=True)
connection, _ = server.accept()
while data := connection.recv(65536):
    connection.sendall(data)
