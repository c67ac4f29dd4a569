import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.BatchReceivePolicy;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.ConsumerBuilder;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Messages;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.RegexSubscriptionMode;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;

/** Ways to receive: listeners, queues, batches, several topics, patterns. */
final class Consuming {

    public static Object aListener(Program p) throws Exception {
        String topic = p.topic();
        List<Object> got = Collections.synchronizedList(new ArrayList<>());
        p.consuming(topic).messageListener((consumer, message) -> {
            got.add(p.seen(message));
            consumer.acknowledgeAsync(message);
        }).subscribe();
        p.send(p.producer(topic), "a", "b", "c");
        p.until("all came", () -> got.size() == 3);
        p.until("none is left", () -> p.backlog(topic) == 0);
        return got;
    }

    public static Object receivingWithoutWaiting(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.consumer(topic);
        List<CompletableFuture<Message<byte[]>>> waiting = List.of(consumer.receiveAsync(), consumer.receiveAsync());
        p.send(p.producer(topic), "a", "b");
        List<Object> got = new ArrayList<>();
        for (CompletableFuture<Message<byte[]>> one : waiting) {
            got.add(p.seen(one.get(Program.WAIT_S, TimeUnit.SECONDS)));
        }
        return got;
    }

    public static Object receivingInBatches(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.consuming(topic).batchReceivePolicy(
                BatchReceivePolicy.builder().maxNumMessages(4).timeout(2, TimeUnit.SECONDS).build()).subscribe();
        p.sendAll(p.batching(topic), "a", "b", "c", "d", "e", "f");
        List<Object> found = new ArrayList<>();
        for (int at = 0; at < 2; at++) {
            Messages<byte[]> messages = consumer.batchReceive();
            List<Object> got = new ArrayList<>();
            messages.forEach(message -> got.add(p.seen(message)));
            consumer.acknowledge(messages);
            found.add(got);
        }
        p.until("none is left", () -> p.backlog(topic) == 0);
        return found;
    }

    public static Object noReceiverQueue(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.consuming(topic).receiverQueueSize(0).subscribe();
        p.send(p.producer(topic), "a", "b", "c");
        List<Object> got = new ArrayList<>();
        for (int at = 0; at < 3; at++) {
            Message<byte[]> message = consumer.receiveAsync().get(Program.WAIT_S, TimeUnit.SECONDS);
            got.add(p.seen(message));
            consumer.acknowledge(message);
        }
        return got;
    }

    public static Object aQueueThatIsSmallerThanABatch(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.consuming(topic).receiverQueueSize(2).subscribe();
        Producer<byte[]> producer = p.batching(topic);
        p.sendAll(producer, Program.numbered("a", 10));
        p.sendAll(producer, Program.numbered("b", 10));
        return Program.map("got", p.texts(consumer, 20), "then", p.nothing(consumer));
    }

    public static Object pausing(Program p) throws Exception {
        String topic = p.topic();
        ConsumerBuilder<byte[]> settings = p.consuming(topic).startPaused(true).receiverQueueSize(1);
        Consumer<byte[]> consumer = settings.subscribe();
        p.send(p.producer(topic), "a", "b", "c");
        Object paused = p.nothing(consumer);
        consumer.resume();
        return Program.map("paused", paused, "resumed", p.receive(consumer, 3));
    }

    public static Object severalTopics(Program p) throws Exception {
        List<String> topics = List.of(p.topic("one"), p.topic("two"), p.topic("three"));
        Consumer<byte[]> consumer = p.client().newConsumer().topics(topics).subscriptionName("s").subscribe();
        for (String topic : topics) {
            p.send(p.producer(topic), "a", "b");
        }
        List<String> got = new ArrayList<>();
        for (Message<byte[]> message : p.next(consumer, 6)) {
            got.add(p.shown(message.getTopicName()) + " " + Program.text(message.getData()));
            consumer.acknowledge(message);
        }
        got.sort(null);
        for (String topic : topics) {
            p.until("none is left", () -> p.backlog(topic) == 0);
        }
        return Program.map("got", got, "then", p.nothing(consumer));
    }

    private static ConsumerBuilder<byte[]> pattern(Program p, String start) throws Exception {
        return p.client().newConsumer().topicsPattern(start + ".*").subscriptionName("s")
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest);
    }

    /**
     * The client would look by itself after an hour only: it is the watcher that says what is new. Pulsar takes patterns of
     * at most 50 characters.
     */
    public static Object aPatternWatchesTopics(Program p) throws Exception {
        String start = p.shortTopic("in-");
        p.send(p.producer(start + "one"), "a");
        p.send(p.producer(p.shortTopic("out")), "no");
        Consumer<byte[]> consumer = pattern(p, start).patternAutoDiscoveryPeriod(1, TimeUnit.HOURS).subscribe();
        List<String> first = p.texts(consumer, 1);
        p.send(p.producer(start + "two"), "b");
        List<String> second = p.texts(consumer, 1);
        p.admin("PUT", Program.path(start + "three") + "/partitions", "2");
        p.send(p.producer(start + "three"), "c", "d");
        List<String> third = p.texts(consumer, 2);
        third.sort(null);
        return Program.map("first", first, "second", second, "partitioned", third, "then", p.nothing(consumer));
    }

    @Program.Slow
    public static Object aPatternLooksAgain(Program p) throws Exception {
        p.send(p.producer(p.topic("in-one")), "a");
        Consumer<byte[]> consumer = pattern(p, p.topic("in-")).patternAutoDiscoveryPeriod(1, TimeUnit.SECONDS).subscribe();
        List<String> first = p.texts(consumer, 1);
        p.send(p.producer(p.topic("in-two")), "b");
        return List.of(first, p.texts(consumer, 1));
    }

    public static Object patternsByDomain(Program p) throws Exception {
        String persistent = p.topic("in-one");
        String other = persistent.replace("persistent://", "non-persistent://").replace("in-one", "in-two");
        p.send(p.producer(persistent), "a");
        Producer<byte[]> producer = p.producer(other);
        List<Object> found = new ArrayList<>();
        for (RegexSubscriptionMode mode : RegexSubscriptionMode.values()) {
            Consumer<byte[]> consumer = pattern(p, p.topic("in-").replace("persistent://", ""))
                    .subscriptionName(mode.name()).subscriptionTopicsMode(mode).subscribe();
            p.send(producer, "b");
            List<String> got = p.texts(consumer, mode == RegexSubscriptionMode.AllTopics ? 2 : 1);
            got.sort(null);
            found.add(List.of(mode.name(), got, p.nothing(consumer)));
            consumer.close();
        }
        return found;
    }

    public static Object allPartitions(Program p) throws Exception {
        String topic = p.partitioned(3);
        Producer<byte[]> producer = p.producer(topic);
        p.send(producer, Program.numbered("", 30));
        List<Object> found = new ArrayList<>();
        for (SubscriptionType type : SubscriptionType.values()) {
            Consumer<byte[]> consumer = p.consuming(topic).subscriptionName(type.name()).subscriptionType(type).subscribe();
            List<String> got = p.texts(consumer, 30);
            got.sort(null);
            found.add(List.of(type.name(), got.equals(List.of(Program.numbered("", 30)))));
        }
        return found;
    }

    @Program.Slow
    public static Object partitionsAreAdded(Program p) throws Exception {
        String topic = p.partitioned(1);
        Consumer<byte[]> consumer = p.consuming(topic).autoUpdatePartitionsInterval(1, TimeUnit.SECONDS).subscribe();
        Producer<byte[]> producer = p.producing(topic).autoUpdatePartitionsInterval(1, TimeUnit.SECONDS).create();
        p.admin("POST", Program.path(topic) + "/partitions", "3");
        p.until("the producer knows", () -> producer.getNumOfPartitions() == 3);
        p.send(producer, Program.numbered("", 9));
        List<String> got = p.texts(consumer, 9);
        got.sort(null);
        return got;
    }

    public static Object theLastMessageIds(Program p) throws Exception {
        String topic = p.partitioned(2);
        Consumer<byte[]> consumer = p.consumer(topic);
        List<Object> empty = new ArrayList<>();
        consumer.getLastMessageIds().forEach(id -> empty.add(List.of(p.shown(id.getOwnerTopic()), p.id(id, id.getOwnerTopic()))));
        Producer<byte[]> producer = p.batching(topic + "-partition-0");
        List<Program.Id> sent = p.sendAll(producer, "a", "b", "c");
        sent.addAll(p.send(p.producer(topic + "-partition-1"), "d", "e"));
        List<Object> found = new ArrayList<>();
        consumer.getLastMessageIds().forEach(id -> found.add(p.id(id, topic)));
        List<Object> sorted = new ArrayList<>(empty);
        sorted.sort((one, two) -> one.toString().compareTo(two.toString()));
        return Program.map("empty", sorted, "sent", sent, "partitions", found.size(), "last",
                found.stream().sorted((one, two) -> ((Program.Id) one).partition() - ((Program.Id) two).partition()).toList());
    }
}
