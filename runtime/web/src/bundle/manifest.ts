/** The parts of a bundle's manifest that a client reads. `docs/bundle.md` describes each field. */

import { MoaError } from "../errors.js";
import type { StoppingRule } from "../offline_stopping.js";
import type { Fingerprints } from "../session/handshake.js";

export const SCHEMA_VERSION = 2;
export const MANIFEST_FILE = "manifest.json";
export const TOKENIZER_FILE = "tokenizer.json";
export const CHAT_TEMPLATE_FILE = "chat_template.jinja";

/** A bundle is missing, damaged or too new, or cannot be downloaded. */
export class BundleError extends MoaError {
  override readonly name = "BundleError";
}

/** One input or output of a graph; a size that varies is named by a symbol such as `"T"`. */
export interface TensorSpec {
  readonly name: string;
  readonly dtype: string;
  readonly shape: readonly (number | string)[];
}

/** One graph. */
export interface TargetEntry {
  /** Relative to the bundle. */
  readonly file: string;
  readonly inputs: readonly TensorSpec[];
  readonly outputs: readonly TensorSpec[];
  /** Caches that the engine keeps, which Core ML has. */
  readonly states: readonly TensorSpec[];
  /** Session options of onnxruntime-web: `details.session`. */
  readonly session: { readonly [option: string]: unknown };
}

/** A whole model for writing offline. */
export interface WriterEntry extends TargetEntry {
  /** Positions that it was trained for. */
  readonly maxContext: number;
}

/** Digest (SHA-256, hexadecimal) and size of one file. */
export interface FileEntry {
  readonly sha256: string;
  readonly bytes: number;
}

/** The sampling that the target's authors recommend for chats. */
export interface RecommendedSampling {
  readonly temperature: number;
  readonly topP: number;
}

/** The manifest of a bundle. */
export interface Manifest {
  readonly fingerprints: Fingerprints;
  /** The target's name, for messages. */
  readonly target: string;
  /** Numbers of its weights, for messages; 0 if they are not known. */
  readonly targetParameters: number;
  /** Of the drafter; see {@link hasGraph}. */
  readonly architecture: string;
  readonly vocabSize: number;
  readonly maxContext: number;
  readonly stopTokens: readonly number[];
  readonly specialTokens: { readonly [name: string]: string };
  /** The drafter's graphs, by target: `web` for onnxruntime-web, `onnx`, `coreml`, `executorch`. */
  readonly targets: ReadonlyMap<string, TargetEntry>;
  /** The writer's graphs, by target. */
  readonly writers: ReadonlyMap<string, WriterEntry>;
  /** The drafter's stopping rule offline; null if none was fitted. */
  readonly manners: StoppingRule | null;
  readonly sampling: RecommendedSampling | null;
  /** Every file of the bundle but the manifest. */
  readonly files: ReadonlyMap<string, FileEntry>;
}

/** Return whether a bundle with a drafter of this architecture has a graph; else the device copies, or drafts nothing. */
export function hasGraph(architecture: string): boolean {
  return architecture !== "sssd" && architecture !== "none";
}

/**
 * Read `manifest.json`.
 *
 * @throws BundleError not a manifest, another schema version, or a field that is missing or malformed.
 */
export function readManifest(said: string): Manifest {
  let raw: unknown;
  try {
    raw = JSON.parse(said);
  } catch {
    raw = null;
  }
  if (!isFields(raw) || !("schema_version" in raw)) {
    throw new BundleError(`${MANIFEST_FILE} is no bundle manifest: export the bundle again`);
  }
  if (raw["schema_version"] !== SCHEMA_VERSION) {
    const version = JSON.stringify(raw["schema_version"]);
    const versions = `the bundle has schema version ${version}, this moa-edge reads version ${SCHEMA_VERSION}`;
    throw new BundleError(`${versions}: upgrade moa-edge, or export the bundle again`);
  }
  const manifest: Manifest = {
    fingerprints: part(raw, "fingerprints", fingerprints),
    target: part(raw, "target", text),
    targetParameters: part(raw, "target_parameters", optional(count)) ?? 0,
    architecture: part(raw, "architecture", optional(text)) ?? "moa",
    vocabSize: part(raw, "vocab_size", count),
    maxContext: part(raw, "max_context", count),
    stopTokens: part(raw, "stop_tokens", listOf(count)),
    specialTokens: part(raw, "special_tokens", (value) => Object.fromEntries(mapOf(text)(value))),
    targets: part(raw, "targets", mapOf(target)),
    writers: writersOf(raw),
    manners: part(raw, "manners", optional(manners)),
    sampling: part(raw, "sampling", optional(sampling)),
    files: part(raw, "files", mapOf(file)),
  };
  for (const name of manifest.files.keys()) {
    if (!staysInside(name)) throw malformed(`file name ${JSON.stringify(name)} leaves the bundle`);
  }
  // Files that are opened must be listed, because only listed files are checked.
  const graphs = [...manifest.targets.values(), ...manifest.writers.values()].map(({ file }) => file);
  for (const name of [TOKENIZER_FILE, CHAT_TEMPLATE_FILE, ...graphs]) {
    if (!isListed(name, manifest.files)) throw malformed(`files does not list ${JSON.stringify(name)}`);
  }
  return manifest;
}

/** Return whether files are listed: a Core ML package is a folder. */
function isListed(name: string, files: Manifest["files"]): boolean {
  return files.has(name) || [...files.keys()].some((file) => file.startsWith(`${name}/`));
}

/** Read the writers: `writer` is that for onnxruntime, `web_writer` that for onnxruntime-web, and so on. */
function writersOf(raw: Fields): Map<string, WriterEntry> {
  const writers = new Map<string, WriterEntry>();
  for (const field of Object.keys(raw)) {
    const found = field === "writer" || field.endsWith("_writer") ? part(raw, field, optional(writer)) : null;
    if (found) writers.set(field === "writer" ? "onnx" : field.slice(0, -"_writer".length), found);
  }
  return writers;
}

type Fields = { readonly [key: string]: unknown };
type JsonReader<T> = (value: unknown) => T;

/** A value has an unexpected form. */
class FormError extends Error {}

function part<T>(raw: Fields, name: string, read: JsonReader<T>): T {
  if (!(name in raw) && !["architecture", "target_parameters", "manners", "sampling"].includes(name)) throw malformed(`it lacks ${JSON.stringify(name)}`);
  try {
    return read(raw[name]);
  } catch (error) {
    if (!(error instanceof FormError)) throw error;
    throw malformed(`${JSON.stringify(name)} is not of the form that an export writes`);
  }
}

function malformed(why: string): BundleError {
  return new BundleError(`${MANIFEST_FILE} is malformed (${why}): export the bundle again`);
}

function isFields(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function fields(value: unknown): Fields {
  if (!isFields(value)) throw new FormError();
  return value;
}

function number(value: unknown): number {
  if (typeof value !== "number" || !Number.isFinite(value)) throw new FormError();
  return value;
}

function count(value: unknown): number {
  const whole = number(value);
  if (!Number.isSafeInteger(whole) || whole < 0) throw new FormError();
  return whole;
}

function text(value: unknown): string {
  if (typeof value !== "string") throw new FormError();
  return value;
}

function listOf<T>(read: JsonReader<T>): JsonReader<T[]> {
  return (value) => {
    if (!Array.isArray(value)) throw new FormError();
    return value.map(read);
  };
}

function mapOf<T>(read: JsonReader<T>): JsonReader<Map<string, T>> {
  return (value) => new Map(Object.entries(fields(value)).map(([name, item]) => [name, read(item)]));
}

function optional<T>(read: JsonReader<T>): JsonReader<T | null> {
  return (value) => (value === null || value === undefined ? null : read(value));
}

function fingerprints(value: unknown): Fingerprints {
  const raw = fields(value);
  return { target: text(raw["target"]), tokenizer: text(raw["tokenizer"]), drafter: text(raw["drafter"] ?? "") };
}

/** Return the specifications of a state or an input; undefined if there is none of this name. */
export function specOf({ inputs, states }: TargetEntry, name: string): TensorSpec | undefined {
  return [...inputs, ...states].find((spec) => spec.name === name);
}

function tensor(value: unknown): TensorSpec {
  const { name, dtype, shape } = fields(value);
  const size = (one: unknown): number | string => (typeof one === "string" ? one : count(one));
  return { name: text(name), dtype: text(dtype), shape: listOf(size)(shape) };
}

function target(value: unknown): TargetEntry {
  const raw = fields(value);
  const session = fields(fields(raw["details"])["session"] ?? {});
  return { file: text(raw["file"]), inputs: listOf(tensor)(raw["inputs"]), outputs: listOf(tensor)(raw["outputs"]), states: listOf(tensor)(raw["states"] ?? []), session };
}

function writer(value: unknown): WriterEntry {
  return { ...target(value), maxContext: count(fields(fields(value)["details"])["max_context"]) };
}

function manners(value: unknown): StoppingRule {
  const raw = fields(value);
  const whole = { repeated: count(raw["repeated"]), longest: count(raw["longest"]) };
  return { leastProbability: number(raw["least_probability"]), ...whole };
}

function sampling(value: unknown): RecommendedSampling {
  const raw = fields(value);
  const said = { temperature: number(raw["temperature"]), topP: number(raw["top_p"]) };
  if (said.temperature < 0 || said.topP <= 0 || said.topP > 1) throw new FormError();
  return said;
}

function file(value: unknown): FileEntry {
  const raw = fields(value);
  const sha256 = text(raw["sha256"]);
  if (!/^[0-9a-f]{64}$/.test(sha256)) throw new FormError();
  return { sha256, bytes: count(raw["bytes"]) };
}

function staysInside(name: string): boolean {
  if (name === MANIFEST_FILE || /[\\\p{C}]/u.test(name)) return false; // half a character has no URL
  return name.split("/").every((each) => !["", ".", ".."].includes(each));
}
