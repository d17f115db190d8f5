"""The HTTP gateway: FastAPI on uvicorn; bytes are forwarded to the engine over a unix socket.

Importing the package costs nothing. `app` and `server` import FastAPI, uvicorn and aiohttp (0.6 s compiled) and must be
imported after the engine's start.
"""
