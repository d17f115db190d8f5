// The stream of events, open only while the page is looked at.

import { statusOf } from "./session.js";

const PATH = "/appliance/v1/events";
const NAMES = ["now", "status", "plan", "profile", "tuning", "hardware", "log", "doctor", "requests", "request"];
const AGAIN_MS = 2000;

/** Calls `onEvent(name, document)` for each event, and `onState` with "open", "lost", "login" or "full". */
export function watch(onEvent, onState) {
  let source = null;
  let timer = 0;

  function open() {
    if (source || document.hidden) return;
    source = new EventSource(PATH);
    source.onopen = () => onState("open");
    for (const name of NAMES) source.addEventListener(name, (event) => onEvent(name, JSON.parse(event.data)));
    source.onerror = async () => {
      close();
      const status = await statusOf("/appliance/v1/status");
      onState(status === 401 ? "login" : status === 200 ? "full" : "lost");
      if (status !== 401) timer = setTimeout(open, AGAIN_MS);
    };
  }

  function close() {
    clearTimeout(timer);
    source?.close();
    source = null;
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  open();
  return open;
}
