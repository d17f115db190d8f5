// The chats, kept in this browser only.

import { read, write } from "./storage.js";

const NAME = "chats";
const MOST = 100;
export const TITLE = 60; // characters
const ROLES = new Set(["user", "assistant"]);

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const listOf = (value, make) => (Array.isArray(value) ? value.map(make).filter((one) => one !== null) : []);
const textOf = (value) => (typeof value === "string" ? value : "");
const numberOf = (value) => (Number.isFinite(value) ? value : null);

/** Returns what is kept under a name, from JSON; null if it is none. */
function parsed(name) {
  try {
    return JSON.parse(read(name));
  } catch {
    return null;
  }
}

/** Returns a picture that the page itself may have kept; null for any other address, which the engine might fetch. */
const imageOf = (value) => (textOf(value).startsWith("data:image/") ? value : null);

const callOf = (value) => (isObject(value) ? { name: textOf(value.name), arguments: textOf(value.arguments) } : null);

/** Returns a message with the fields that the page uses, each of the type that it needs; null if it is no message. */
function messageOf(value) {
  if (!isObject(value) || !ROLES.has(value.role)) return null;
  const { role, text, model, reasoning, problem, usage } = value;
  if (role === "user") return { role, text: textOf(text), images: listOf(value.images, imageOf) };
  return {
    role,
    text: textOf(text),
    model: textOf(model),
    reasoning: textOf(reasoning),
    problem: textOf(problem) || null,
    calls: listOf(value.calls, callOf),
    tokens: numberOf(value.tokens),
    seconds: numberOf(value.seconds),
    speed: numberOf(value.speed),
    usage: { prompt_tokens_details: { cached_tokens: numberOf(usage?.prompt_tokens_details?.cached_tokens) } },
  };
}

function chatOf(value) {
  if (!isObject(value) || !textOf(value.id)) return null;
  const messages = listOf(value.messages, messageOf);
  return messages.length ? { id: value.id, title: textOf(value.title).slice(0, TITLE), messages } : null;
}

/** Returns the kept chats, the latest first: {id, title, messages}. What is none of this page's is left out. */
export function kept() {
  const ids = new Set();
  const isFirst = ({ id }) => !ids.has(id) && ids.add(id);
  return listOf(parsed(NAME), chatOf).filter(isFirst).slice(0, MOST);
}

/** Keeps the chats. Without room the oldest go, and pictures before them. Returns what is kept. */
export function keep(chats) {
  let left = chats.filter((chat) => chat.messages.length).slice(0, MOST);
  for (let round = 0; !write(NAME, JSON.stringify(left)); round++) {
    if (round === 0) left = left.map((chat) => ({ ...chat, messages: chat.messages.map((one) => ({ ...one, images: [] })) }));
    else if (left.length > 1) left = left.slice(0, Math.ceil(left.length / 2));
    else break;
  }
  return left;
}

export const fresh = () => ({ id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", messages: [] });

const SETTINGS = { system: "", temperature: "", top_p: "", max_tokens: "" };

export function settings() {
  const found = parsed("chat-settings");
  return Object.fromEntries(Object.keys(SETTINGS).map((name) => [name, textOf(found?.[name])]));
}

export const keepSettings = (found) => write("chat-settings", JSON.stringify(found));

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
