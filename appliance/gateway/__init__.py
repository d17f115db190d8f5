"""The HTTP front door: FastAPI on uvicorn, bytes forwarded to the engine over a unix socket.

Importing the package costs nothing. `progress` is light as well, so that a start can keep its phase from the first
moment; `app` and `server` import FastAPI, uvicorn and aiohttp (0.6 s compiled) and belong after the engine's start.
"""
