// Numbers and names as text.

import { language, t } from "./strings.js";

const numbers = new Intl.NumberFormat(language === "zh" ? "zh-CN" : "en", { maximumFractionDigits: 0 });
const UNSEEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** Returns text of others with control and direction characters shown as escapes. */
export const clean = (text) =>
  String(text ?? "").replace(UNSEEN, (char) => "\\u" + char.charCodeAt(0).toString(16).padStart(4, "0"));

export const count = (value) => (value == null ? "–" : numbers.format(value));

/** Returns a speed with three digits that mean something. */
export const speed = (value) => (value == null ? "–" : value < 10 ? value.toFixed(1) : numbers.format(value));

export const share = (value) => (value == null ? "–" : `${Math.round(100 * value)} %`);

export const gib = (mib) => (mib == null ? "–" : (mib / 1024).toFixed(mib < 10240 ? 1 : 0));

export function seconds(value) {
  if (value == null) return "–";
  if (value < 0.995) return `${Math.round(1000 * value)} ms`;
  if (value < 60) return `${value.toFixed(value < 9.95 ? 1 : 0)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

export const clock = (unix) => new Date(1000 * unix).toLocaleTimeString(language === "zh" ? "zh-CN" : "en-GB");

/** Returns the words for a code such as a phase; the code itself if there are none. */
export function word(prefix, code) {
  const words = t(`${prefix}_${code}`);
  return words.startsWith(`${prefix}_`) ? clean(code) : words;
}
