/** The files of the vectors in an engine without files: a script before defines them. */

const { vectors } = globalThis as unknown as { readonly vectors: { readonly [name: string]: string } };

/** Return a file's text. */
export function textOf(name: string): string {
  return vectors[name]!;
}

/** Return the text of a compressed file. */
export function unpacked(name: string): string {
  return vectors[name]!;
}
