/** One screen: a chat that goes on without a network. */

import AsyncStorage from "@react-native-async-storage/async-storage";
import NetInfo from "@react-native-community/netinfo";
import { Chat, MoaError, Models, chatStore, fetchBundle, followApp, openBundle, reactNativeHost } from "@moa-edge/react-native";
import * as ort from "onnxruntime-react-native";
import { useEffect, useRef, useState } from "react";
import { AppState, Button, SafeAreaView, ScrollView, StyleSheet, Switch, Text, TextInput, View } from "react-native";

import { folderOf } from "./folder";

// moa-serve --bundle, in a network that you trust; wss:// elsewhere. The token is that of --token, if it has one.
const SERVER = { url: "ws://192.168.0.2:8765", token: "" };
const COLOURS = { corrected: "#111", drafted: "#111", kept: "#111", offline: "#a60" };

let closing; // the chat of the screen before: a stored chat can be opened once at a time

/** Open the bundle, from the phone if it is there, and a chat, with the answer that was under way. */
async function connect(onProgress) {
  const folder = await folderOf("bundle");
  const held = await openBundle(folder).catch(() => undefined);
  const found = held ?? (await fetchBundle(SERVER, folder, { graphs: "onnx", writer: true, onProgress }));
  const models = await Models.load(found, { ort });
  const store = chatStore(AsyncStorage, "chat");
  const options = { ...models.forConversation(), host: reactNativeHost(), store, policy: "ask", wait: false };
  const chat = await Chat.connect(found.bundle, SERVER, options);
  return { chat, close: () => chat.close().finally(() => models.close()) };
}

export default function App() {
  const [chat, setChat] = useState();
  const [turns, setTurns] = useState([]);
  const [spans, setSpans] = useState([]);
  const [link, setLink] = useState("");
  const [question, setQuestion] = useState("");
  const [offline, setOffline] = useState(false);
  const answer = useRef();

  useEffect(() => {
    let opened, stop;
    let left = false;
    const begin = async () => {
      await closing;
      const made = await connect((files, all) => setLink(`downloading: ${files} of ${all} files`));
      if (left) return made.close();
      const chat = made.chat;
      opened = made;
      chat.onLink = ({ status, detail }) => setLink(detail ? `${status}: ${detail}` : status);
      stop = followApp(chat, AppState, NetInfo);
      setLink(chat.status);
      setTurns(chat.messages);
      setChat(chat);
      const pending = chat.pending();
      if (pending) await follow(chat, pending);
    };
    const begun = begin().catch(say);
    return () => {
      left = true;
      stop?.();
      closing = Promise.allSettled([opened?.close(), begun]);
    };
  }, []);

  const say = (error) => setLink(error instanceof MoaError ? error.message : String(error));

  async function follow(chat, events) {
    answer.current = events;
    try {
      for await (const event of events) {
        setTurns([...chat.messages, ...(event.event === "AnswerFinished" ? [] : [{ role: "user", content: chat.question }])]);
        if (event.event === "AnswerUpdate") setSpans(event.spans);
        else if (event.event === "AnswerFinished") setSpans([]);
        else if (event.event === "Paused") setLink(`waiting: ${event.reason}`);
      }
    } catch (error) {
      say(error);
    }
    answer.current = undefined;
    setTurns(chat.messages);
    setSpans([]);
  }

  const send = () => {
    setQuestion("");
    follow(chat, chat.send(question, { maxNewTokens: 256 }));
  };

  const switchOffline = (value) => {
    setOffline(value);
    chat?.workOffline(value);
  };

  return (
    <SafeAreaView style={styles.screen}>
      <View style={styles.row}>
        <Text style={styles.link}>{link}</Text>
        <Text>offline</Text>
        <Switch value={offline} onValueChange={switchOffline} />
      </View>
      <ScrollView style={styles.turns}>
        {turns.map(({ role, content }, at) => (
          <Text key={at} style={role === "user" ? styles.question : styles.answer}>
            {content}
          </Text>
        ))}
        <Text style={styles.answer}>
          {spans.map(({ text, origin, committed }, at) => (
            <Text key={at} style={{ color: COLOURS[origin], opacity: committed ? 1 : 0.5 }}>
              {text}
            </Text>
          ))}
        </Text>
      </ScrollView>
      <View style={styles.row}>
        <TextInput style={styles.input} value={question} onChangeText={setQuestion} placeholder="Ask something" />
        {answer.current ? (
          <Button title="Stop" onPress={() => answer.current?.return()} />
        ) : (
          <Button title="Send" onPress={send} disabled={!chat || !question} />
        )}
      </View>
    </SafeAreaView>
  );
}

const styles = StyleSheet.create({
  screen: { flex: 1, margin: 12 },
  row: { flexDirection: "row", alignItems: "center", gap: 8 },
  link: { flex: 1, color: "#666" },
  turns: { flex: 1 },
  question: { fontWeight: "bold", marginTop: 12 },
  answer: { marginTop: 4 },
  input: { flex: 1, borderWidth: 1, borderColor: "#ccc", borderRadius: 6, padding: 8 },
});
