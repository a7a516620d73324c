// The beginning of a program in the shell of JavaScriptCore: what a bare engine lacks is removed, and only lines go in and out.
"use strict";
const { print, readline, drainMicrotasks, preciseTime } = globalThis;
for (const name of Object.getOwnPropertyNames(globalThis)) {
  if (["setTimeout", "clearTimeout", "WebAssembly", "Intl", "performance", "console", "setInterval"].includes(name)) delete globalThis[name];
}
const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

function base64(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 3) {
    const three = (bytes[at] << 16) | ((bytes[at + 1] ?? 0) << 8) | (bytes[at + 2] ?? 0);
    const digits = [18, 12, 6, 0].map((shift) => DIGITS[(three >> shift) & 63]).join("");
    text += at + 2 < bytes.length ? digits : digits.slice(0, bytes.length - at + 1) + "=".repeat(3 - bytes.length + at);
  }
  return text;
}

function bytes(text) {
  const end = text.endsWith("==") ? 2 : text.endsWith("=") ? 1 : 0;
  const made = new Uint8Array((text.length / 4) * 3 - end);
  for (let at = 0, to = 0; at < text.length; at += 4) {
    let four = 0;
    for (let digit = 0; digit < 4; digit++) four = (four << 6) | Math.max(0, DIGITS.indexOf(text[at + digit]));
    for (let shift = 16; shift >= 0 && to < made.length; shift -= 8) made[to++] = (four >> shift) & 255;
  }
  return made;
}

function say(name, ...given) {
  print(JSON.stringify([name, ...given.map((each) => (each instanceof Uint8Array ? { bytes: base64(each) } : each))]));
}

/** Take lines, each a call of a method of `object`, until the line null. */
function serve(object) {
  for (;;) {
    const line = JSON.parse(readline());
    if (line === null) return;
    const [name, ...given] = line;
    object[name](...given.map((each) => (each && typeof each === "object" ? bytes(each.bytes) : each)));
    drainMicrotasks();
  }
}
