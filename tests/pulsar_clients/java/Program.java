import java.lang.annotation.Retention;
import java.lang.annotation.RetentionPolicy;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.function.UnaryOperator;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.pulsar.client.api.ClientBuilder;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.ConsumerBuilder;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.MessageIdAdv;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerBuilder;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.ReaderBuilder;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;

/** One scenario: clients, names of its own, and the means to say what it saw; program.py has the same for Python. */
public final class Program {
    static final int WAIT_S = 20; // for what must come
    static final int NOTHING_MS = 300; // for what must not
    private static final int LONGEST = 200; // of a payload that stands in a trace as it is

    /** Of a scenario that takes several seconds, so that it is begun early. */
    @Retention(RetentionPolicy.RUNTIME)
    @interface Slow {}

    /** Of a message; Python makes an ordinal of it. */
    record Id(String topic, int partition, long ledger, long entry, int batch_index) {}

    final String name;
    private final String unique;
    private final String url;
    private final String http;
    private final List<PulsarClient> clients = new ArrayList<>();

    Program(String name, String run, String url, String http) {
        this.name = name;
        this.unique = name + "-" + run;
        this.url = url;
        this.http = http;
    }

    void close() {
        clients.forEach(PulsarClient::closeAsync);
    }

    // What it works with.

    PulsarClient newClient(UnaryOperator<ClientBuilder> settings) throws PulsarClientException {
        PulsarClient client = settings.apply(PulsarClient.builder().serviceUrl(url).ioThreads(1).listenerThreads(1)).build();
        clients.add(client);
        return client;
    }

    PulsarClient newClient() throws PulsarClientException {
        return newClient(settings -> settings);
    }

    synchronized PulsarClient client() throws PulsarClientException {
        return clients.isEmpty() ? newClient() : clients.get(0);
    }

    /** A topic of this scenario alone. */
    String topic(String name) {
        return "persistent://public/default/" + unique + "-" + name;
    }

    String topic() {
        return topic("t");
    }

    /** One whose name is short, and not of this scenario alone. */
    String shortTopic(String name) {
        return "persistent://public/default/" + unique.substring(this.name.length() + 1) + name;
    }

    String partitioned(int count) throws Exception {
        admin("PUT", path(topic()) + "/partitions", String.valueOf(count));
        return topic();
    }

    /** A namespace of this scenario alone; `policy` is set to `value`. */
    String namespace(String policy, String value) throws Exception {
        String namespace = "public/" + unique;
        admin("PUT", "namespaces/" + namespace, "{}");
        admin("POST", "namespaces/" + namespace + "/" + policy, value);
        return namespace;
    }

    JsonNode admin(String method, String path, String body) throws Exception {
        HttpRequest request = HttpRequest.newBuilder(URI.create(http + "/admin/v2/" + path))
                .header("Content-Type", "application/json")
                .method(method, HttpRequest.BodyPublishers.ofString(body)).build();
        HttpResponse<String> answer = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
        if (answer.statusCode() >= 300) {
            throw new IllegalStateException(method + " " + path + ": " + answer.statusCode() + " " + answer.body());
        }
        return new ObjectMapper().readTree(answer.body().isEmpty() ? "null" : answer.body());
    }

    JsonNode stats(String topic) throws Exception {
        return admin("GET", path(topic) + "/stats", "");
    }

    int backlog(String topic) throws Exception {
        return stats(topic).get("subscriptions").get("s").get("msgBacklog").asInt();
    }

    static String path(String topic) {
        return topic.replace("://", "/");
    }

    ProducerBuilder<byte[]> producing(String topic) throws PulsarClientException {
        return client().newProducer().topic(topic).enableBatching(false);
    }

    Producer<byte[]> producer(String topic) throws PulsarClientException {
        return producing(topic).create();
    }

    /** Whose batches end with a flush. */
    Producer<byte[]> batching(String topic) throws PulsarClientException {
        return producing(topic).enableBatching(true).batchingMaxPublishDelay(1, TimeUnit.MINUTES).create();
    }

    ConsumerBuilder<byte[]> consuming(String topic) throws PulsarClientException {
        return consuming(client(), topic);
    }

    ConsumerBuilder<byte[]> consuming(PulsarClient client, String topic) {
        return client.newConsumer().topic(topic).subscriptionName("s")
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest);
    }

    Consumer<byte[]> consumer(String topic) throws PulsarClientException {
        return consuming(topic).subscribe();
    }

    Consumer<byte[]> shared(String topic) throws PulsarClientException {
        return consuming(topic).subscriptionType(SubscriptionType.Shared).subscribe();
    }

    ReaderBuilder<byte[]> reading(String topic) throws PulsarClientException {
        return client().newReader().topic(topic).startMessageId(MessageId.earliest);
    }

    // What it does.

    List<Id> send(Producer<byte[]> producer, String... contents) throws PulsarClientException {
        List<Id> ids = new ArrayList<>();
        for (String content : contents) {
            ids.add(id(producer.send(bytes(content)), producer.getTopic()));
        }
        return ids;
    }

    /** Without waiting in between; ends with a flush. */
    List<Id> sendAll(Producer<byte[]> producer, String... contents) throws Exception {
        List<CompletableFuture<MessageId>> sent = new ArrayList<>();
        for (String content : contents) {
            sent.add(producer.sendAsync(bytes(content)));
        }
        return answered(producer, sent);
    }

    List<Id> answered(Producer<?> producer, List<CompletableFuture<MessageId>> sent) throws Exception {
        producer.flush();
        List<Id> ids = new ArrayList<>();
        for (CompletableFuture<MessageId> one : sent) {
            ids.add(id(one.get(WAIT_S, TimeUnit.SECONDS), producer.getTopic()));
        }
        return ids;
    }

    <T> Message<T> next(Consumer<T> consumer) throws PulsarClientException {
        Message<T> message = consumer.receive(WAIT_S, TimeUnit.SECONDS);
        if (message == null) {
            throw new IllegalStateException("no message came");
        }
        return message;
    }

    <T> List<Message<T>> next(Consumer<T> consumer, int count) throws PulsarClientException {
        List<Message<T>> found = new ArrayList<>();
        for (int at = 0; at < count; at++) {
            found.add(next(consumer));
        }
        return found;
    }

    /** The next messages, acknowledged. */
    List<Object> receive(Consumer<byte[]> consumer, int count) throws PulsarClientException {
        List<Object> found = new ArrayList<>();
        for (int at = 0; at < count; at++) {
            Message<byte[]> message = next(consumer);
            found.add(seen(message));
            consumer.acknowledge(message);
        }
        return found;
    }

    /** Their contents alone. */
    List<String> texts(Consumer<byte[]> consumer, int count) throws PulsarClientException {
        List<String> found = new ArrayList<>();
        for (int at = 0; at < count; at++) {
            Message<byte[]> message = next(consumer);
            found.add(text(message.getData()));
            consumer.acknowledge(message);
        }
        return found;
    }

    /** What each got, until they have so many messages together. */
    List<List<Message<byte[]>>> drained(List<Consumer<byte[]>> consumers, int count) throws PulsarClientException {
        List<List<Message<byte[]>>> got = new ArrayList<>();
        consumers.forEach(one -> got.add(new ArrayList<>()));
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(WAIT_S);
        int found = 0;
        while (found < count) {
            for (int at = 0; at < consumers.size(); at++) {
                Message<byte[]> message;
                while ((message = consumers.get(at).receive(50, TimeUnit.MILLISECONDS)) != null) {
                    consumers.get(at).acknowledge(message);
                    got.get(at).add(message);
                    found++;
                }
            }
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException(found + " of " + count + " messages came");
            }
        }
        return got;
    }

    Object nothing(Consumer<byte[]> consumer) throws PulsarClientException {
        Message<byte[]> message = consumer.receive(NOTHING_MS, TimeUnit.MILLISECONDS);
        return message == null ? "nothing" : seen(message);
    }

    /** All that the reader says to be available. */
    List<Object> read(Reader<byte[]> reader) throws PulsarClientException {
        List<Object> found = new ArrayList<>();
        while (reader.hasMessageAvailable()) {
            Message<byte[]> message = reader.readNext(WAIT_S, TimeUnit.SECONDS);
            if (message == null) {
                found.add("one is said to be available");
                return found;
            }
            found.add(seen(message));
        }
        return found;
    }

    /** The name of the error; "no error". */
    String fails(Callable<?> call) {
        try {
            call.call();
            return "no error";
        } catch (Exception error) {
            return errorName(error);
        }
    }

    static String errorName(Throwable error) {
        while ((error instanceof ExecutionException || error instanceof CompletionException) && error.getCause() != null) {
            error = error.getCause();
        }
        return error.getClass().getSimpleName();
    }

    <T> T until(String what, Callable<T> condition) throws Exception {
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(WAIT_S);
        while (true) {
            T answer = condition.call();
            if (answer != null && !Boolean.FALSE.equals(answer)) {
                return answer;
            }
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("it did not come to be that " + what);
            }
            Thread.sleep(50);
        }
    }

    // What it saw.

    Id id(MessageId given, String topic) {
        MessageIdAdv id = (MessageIdAdv) given;
        String base = id.getPartitionIndex() < 0 ? topic : topic.replaceFirst("-partition-\\d+$", "");
        return new Id(base, id.getPartitionIndex(), id.getLedgerId(), id.getEntryId(), id.getBatchIndex());
    }

    Map<String, Object> seen(Message<byte[]> message) {
        Map<String, Object> found = new LinkedHashMap<>();
        found.put("data", text(message.getData()));
        found.put("id", id(message.getMessageId(), message.getTopicName()));
        return withRest(found, message);
    }

    private Map<String, Object> withRest(Map<String, Object> found, Message<?> message) {
        if (!message.getProperties().isEmpty()) {
            found.put("properties", new TreeMap<>(message.getProperties()));
        }
        if (message.hasKey()) {
            found.put("key", message.getKey());
        }
        if (message.hasOrderingKey()) {
            found.put("ordering_key", text(message.getOrderingKey()));
        }
        if (message.getEventTime() > 0) {
            found.put("event", message.getEventTime());
        }
        if (message.getRedeliveryCount() > 0) {
            found.put("redelivered", message.getRedeliveryCount());
        }
        return found;
    }

    static String text(byte[] data) {
        if (data == null) {
            return "null";
        }
        if (data.length <= LONGEST) {
            return new String(data, StandardCharsets.UTF_8);
        }
        try {
            byte[] digest = MessageDigest.getInstance("SHA-256").digest(data);
            return data.length + " bytes, " + HexFormat.of().formatHex(digest).substring(0, 16);
        } catch (Exception error) {
            throw new IllegalStateException(error);
        }
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    /** A text without what is unique to this run. */
    String shown(String text) {
        return text.replace(unique + "-", "");
    }

    /** In the given order: name, value, name, value... */
    static Map<String, Object> map(Object... pairs) {
        Map<String, Object> found = new LinkedHashMap<>();
        for (int at = 0; at < pairs.length; at += 2) {
            found.put((String) pairs[at], pairs[at + 1]);
        }
        return found;
    }

    static String[] numbered(String prefix, int count) {
        String[] found = new String[count];
        for (int at = 0; at < count; at++) {
            found[at] = prefix + String.format("%03d", at);
        }
        return found;
    }
}
