/** Draw the page's icons: an M whose first half is written and whose second half is tentative. */

import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { deflateSync } from "node:zlib";

const SIZE = 512; // of the drawing
const WIDTH = 44; // of its strokes
const CORNER = 112;
const BACKGROUND = "#16181c";
const STROKES = [
  { color: "#e7e9ee", points: [[120, 356], [120, 164], [256, 316]] },
  { color: "#f0b45c", points: dots([[256, 316], [392, 164], [392, 356]], 3) },
];
const SAMPLES = 4; // in each direction of a pixel

/** Write `icon.svg` and the PNGs for the manifest and for Apple's systems. */
export async function drawIcons(folder) {
  await writeFile(join(folder, "icon.svg"), svg());
  for (const size of [192, 512]) await writeFile(join(folder, `icon-${size}.png`), png(size, CORNER));
  // The system cuts them to shape, so they have no rounded corners.
  await writeFile(join(folder, "icon-maskable-512.png"), png(512, 0));
  await writeFile(join(folder, "icon-180.png"), png(180, 0));
}

/** Return points on each piece of a line, at equal distances, its end included. Each is a stroke of no length. */
function dots(line, count) {
  return line.slice(1).flatMap((end, at) =>
    Array.from({ length: count }, (_, number) => {
      const part = (number + 1) / count;
      return [0, 1].map((axis) => line[at][axis] + part * (end[axis] - line[at][axis]));
    }),
  );
}

function svg() {
  const [solid, dotted] = STROKES;
  const path = solid.points.map(([x, y], at) => `${at ? "L" : "M"}${x} ${y}`).join("");
  const circles = dotted.points.map(([x, y]) => `<circle cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="${WIDTH / 2}"/>`);
  return (
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${SIZE} ${SIZE}">` +
    `<rect width="${SIZE}" height="${SIZE}" rx="${CORNER}" fill="${BACKGROUND}"/>` +
    `<path d="${path}" fill="none" stroke="${solid.color}" stroke-width="${WIDTH}" stroke-linecap="round" stroke-linejoin="round"/>` +
    `<g fill="${dotted.color}">${circles.join("")}</g></svg>\n`
  );
}

function png(size, corner) {
  const rows = Buffer.alloc(size * (1 + 4 * size)); // each begins with the number of its filter, none
  for (let y = 0; y < size; y++) {
    for (let x = 0; x < size; x++) pixel(x, y, SIZE / size, corner).copy(rows, y * (1 + 4 * size) + 1 + 4 * x);
  }
  const header = Buffer.alloc(13);
  header.writeUInt32BE(size, 0);
  header.writeUInt32BE(size, 4);
  header.set([8, 6], 8); // bits of a channel; red, green, blue and opacity
  const signature = Buffer.from([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]);
  return Buffer.concat([signature, chunk("IHDR", header), chunk("IDAT", deflateSync(rows)), chunk("IEND", Buffer.alloc(0))]);
}

/** Return the mean of some samples: red, green, blue, opacity. */
function pixel(x, y, scale, corner) {
  const sum = [0, 0, 0, 0];
  for (let sample = 0; sample < SAMPLES ** 2; sample++) {
    const at = [x + ((sample % SAMPLES) + 0.5) / SAMPLES, y + (Math.floor(sample / SAMPLES) + 0.5) / SAMPLES];
    const color = colorAt(at[0] * scale, at[1] * scale, corner);
    if (color === null) continue;
    for (let channel = 0; channel < 3; channel++) sum[channel] += parseInt(color.slice(1 + 2 * channel, 3 + 2 * channel), 16);
    sum[3]++;
  }
  const [red, green, blue, seen] = sum;
  const mean = (channel) => (seen ? Math.round(channel / seen) : 0);
  return Buffer.from([mean(red), mean(green), mean(blue), Math.round((255 * seen) / SAMPLES ** 2)]);
}

/** Return the colour at a point; null outside. */
function colorAt(x, y, corner) {
  const [solid, dotted] = STROKES;
  if (dotted.points.some((point) => distance([x, y], point, point) <= WIDTH / 2)) return dotted.color;
  const { points } = solid;
  if (points.slice(1).some((point, at) => distance([x, y], points[at], point) <= WIDTH / 2)) return solid.color;
  const inner = [x, y].map((value) => Math.min(Math.max(value, corner), SIZE - corner));
  return Math.hypot(x - inner[0], y - inner[1]) <= corner ? BACKGROUND : null;
}

/** Return the distance from a point to the line between two others. */
function distance([x, y], [x1, y1], [x2, y2]) {
  const length = (x2 - x1) ** 2 + (y2 - y1) ** 2;
  const part = length ? Math.min(1, Math.max(0, ((x - x1) * (x2 - x1) + (y - y1) * (y2 - y1)) / length)) : 0;
  return Math.hypot(x - x1 - part * (x2 - x1), y - y1 - part * (y2 - y1));
}

const CRC = Uint32Array.from({ length: 256 }, (_, number) => {
  let value = number;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

function chunk(type, data) {
  const body = Buffer.concat([Buffer.from(type, "latin1"), data]);
  let crc = 0xffffffff;
  for (const byte of body) crc = (crc >>> 8) ^ CRC[(crc ^ byte) & 255];
  const made = Buffer.alloc(body.length + 8);
  made.writeUInt32BE(data.length, 0);
  body.copy(made, 4);
  made.writeUInt32BE((crc ^ 0xffffffff) >>> 0, body.length + 4);
  return made;
}
