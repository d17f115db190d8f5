// The chats, kept in this browser only.

const NAME = "chats";
const MOST = 100;

/** Returns the kept chats, the latest first: {id, title, messages}. */
export function kept() {
  try {
    const found = JSON.parse(localStorage.getItem(NAME) ?? "[]");
    return Array.isArray(found) ? found : [];
  } catch {
    return []; // damaged by another program: a new list replaces it
  }
}

/** Keeps the chats. Without room the oldest go, and pictures before them. Returns what is kept. */
export function keep(chats) {
  let left = chats.filter((chat) => chat.messages.length).slice(0, MOST);
  for (let round = 0; ; round++) {
    try {
      localStorage.setItem(NAME, JSON.stringify(left));
      return left;
    } catch {
      if (round === 0) left = left.map((chat) => ({ ...chat, messages: chat.messages.map((one) => ({ ...one, images: [] })) }));
      else if (left.length > 1) left = left.slice(0, Math.ceil(left.length / 2));
      else return left;
    }
  }
}

export const fresh = () => ({ id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", messages: [] });

const SETTINGS = { system: "", temperature: "", top_p: "", max_tokens: "" };

export function settings() {
  try {
    return { ...SETTINGS, ...JSON.parse(localStorage.getItem("chat-settings") ?? "{}") };
  } catch {
    return SETTINGS;
  }
}

export const keepSettings = (found) => localStorage.setItem("chat-settings", JSON.stringify(found));

/** Returns the body of a request for the next answer to `messages`. */
export function requestFor(model, messages, found) {
  const body = { model, messages: [] };
  if (found.system.trim()) body.messages.push({ role: "system", content: found.system });
  for (const { role, text, images } of messages) {
    const parts = (images ?? []).map((url) => ({ type: "image_url", image_url: { url } }));
    body.messages.push({ role, content: parts.length ? [{ type: "text", text }, ...parts] : text });
  }
  for (const name of ["temperature", "top_p", "max_tokens"]) {
    const value = Number(found[name]);
    if (String(found[name]).trim() !== "" && Number.isFinite(value)) body[name] = value;
  }
  return body;
}
