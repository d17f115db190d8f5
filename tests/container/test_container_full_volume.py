"""A volume that fills up while a container serves: it measures into memory, and keeps that once there is room."""

from __future__ import annotations

import docker.types
import requests

from tests.container.stages.containers import IMAGE, MODEL, Stage, started, wait_for

CHAT = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
ENV = {
    "APPLIANCE_MODEL": f"/weights/{MODEL.name}",
    "APPLIANCE_TUNE": "idle",
    "APPLIANCE_IDLE_S": "3600",  # measured when it is asked for, and not before
    "APPLIANCE_BUDGET_S": "5",
    "APPLIANCE_THREADS": "1",
    "APPLIANCE_CTX_SIZE": "1024",
    "APPLIANCE_KV_TYPE": "f16",
    "APPLIANCE_SPECULATION": "off",
}


def answers(stage: Stage, key: dict[str, str]) -> None:
    reply = requests.post(f"{stage.base}/v1/chat/completions", json=CHAT, headers=key, timeout=60)
    assert reply.status_code == 200, reply.text


def test_a_volume_that_fills_up_while_it_serves() -> None:
    disk = docker.types.Mount("/data", None, type="tmpfs", tmpfs_size=8 * 2**20, tmpfs_mode=0o775)
    weights = docker.types.Mount("/weights", str(MODEL.parent), type="bind", read_only=True)
    with started(None, env=ENV, image=IMAGE, mounts=[disk, weights]) as stage:
        stage.wait_ready()
        key = stage.authorized()

        def begun() -> int:
            return requests.post(f"{stage.base}/appliance/v1/tuning", headers=key, timeout=60).status_code

        code, _ = stage.container.exec_run(["sh", "-c", "cat /dev/zero > /data/fill"])
        assert code != 0, "no room is left"
        assert stage.get("/health/ready").status_code == 200
        answers(stage, key)
        assert stage.authorized() == key, "the key can be shown"
        assert begun() == 202
        wait_for(lambda: begun() == 200, 120, stage.logs)
        (words,) = [event["message"] for event in stage.events() if event["event"] == "not_kept"]
        assert "No space left on device" in words
        answers(stage, key)

        stage.run("rm", "/data/fill")
        assert begun() == 200
        wait_for(lambda: "profile_kept" in stage.names(), 60, stage.logs)
        assert stage.run("appliance", "profiles").strip()
        stage.container.reload()
        assert (stage.container.status, stage.container.attrs["RestartCount"]) == ("running", 0)
