/** The token and the addresses. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { AddressError, placeOf, tokenOf } from "../src/access.js";

test("the token is taken out of the fragment, and nothing else is", () => {
  assert.deepEqual(tokenOf("https://host:8765/?a=1#token=s%2Be%20cret&chat=7"), {
    token: "s+e cret",
    rest: "https://host:8765/?a=1#chat=7",
  });
  assert.deepEqual(tokenOf("https://host/#token="), { token: "", rest: "https://host/" });
  assert.equal(tokenOf("https://host/?token=secret"), null); // a query is sent to servers and kept in logs
  assert.equal(tokenOf("https://host/#chat=7"), null);
});

test("a page talks to the verifier that it comes from, by the same scheme", () => {
  assert.deepEqual(placeOf("https://host:8765/index.html#x", ""), {
    verifier: "wss://host:8765/v1/session",
    bundle: "https://host:8765/bundle/",
  });
  assert.equal(placeOf("http://192.168.0.7:8765/", "").verifier, "ws://192.168.0.7:8765/v1/session");
  assert.deepEqual(placeOf("https://proxy/sub/path/index.html?a=/b#c/d", ""), {
    verifier: "wss://proxy/sub/path/v1/session",
    bundle: "https://proxy/sub/path/bundle/",
  });
});

test("an address may be written as people write it", () => {
  for (const address of ["host:8765", "https://host:8765/", "wss://host:8765", " host:8765 "]) {
    assert.equal(placeOf("capacitor://localhost/", address).verifier, "wss://host:8765/v1/session", address);
  }
  assert.equal(placeOf("capacitor://localhost/", "ws://host:1/behind/").bundle, "http://host:1/behind/bundle/");
});

test("what is no address is said in a sentence", () => {
  assert.throws(() => placeOf("https://host/", "http://"), AddressError);
  assert.throws(() => placeOf("https://host/", "ftp://host"), /begins with https/u);
  assert.throws(() => placeOf("capacitor://localhost/", ""), /Enter the server's address/u);
});
