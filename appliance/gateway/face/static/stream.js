// The stream of events, open only while the page is looked at.

import { statusOf } from "./session.js";

/** The model that the page is about; null means the first one. */
export const MODEL = new URLSearchParams(location.search).get("model");
const PATH = `/appliance/v1/events${MODEL ? `?model=${encodeURIComponent(MODEL)}` : ""}`;
const NAMES = ["now", "status", "plan", "profile", "tuning", "hardware", "log", "doctor", "fleet", "requests", "request"];
// Until the next try: longer each time, and not the same for all pages of a server that was restarted.
const AGAIN_MS = [1000, 2000, 4000, 8000, 15000];

/** Calls `onEvent(name, document)` for each event, and `onState` with "open", "lost", "login" or "full". */
export function watch(onEvent, onState) {
  let source = null;
  let timer = 0;
  let tries = 0;

  function open() {
    if (source || document.hidden) return;
    source = new EventSource(PATH);
    source.onopen = () => {
      tries = 0;
      onState("open");
    };
    for (const name of NAMES) source.addEventListener(name, (event) => onEvent(name, JSON.parse(event.data)));
    source.onerror = async () => {
      close();
      const status = await statusOf("/appliance/v1/status");
      onState(status === 401 ? "login" : status === 200 ? "full" : "lost");
      if (status !== 401) timer = setTimeout(open, AGAIN_MS[Math.min(tries++, AGAIN_MS.length - 1)] * (0.5 + Math.random()));
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
