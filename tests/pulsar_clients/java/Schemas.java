import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.schema.GenericRecord;
import org.apache.pulsar.common.schema.KeyValue;
import org.apache.pulsar.common.schema.KeyValueEncodingType;

/** Typed messages. */
final class Schemas {
    /** A record. */
    public static class User {
        public String name;
        public int age;

        static User of(String name, int age) {
            User user = new User();
            user.name = name;
            user.age = age;
            return user;
        }

        @Override
        public String toString() {
            return name + " " + age;
        }
    }

    /** It does not fit: the age is a text. */
    public static class Other {
        public String name;
        public String age;
    }

    private static <T> Producer<T> producer(Program p, Schema<T> schema, String topic) throws Exception {
        return p.client().newProducer(schema).topic(topic).enableBatching(false).create();
    }

    private static <T> Consumer<T> consumer(Program p, Schema<T> schema, String topic) throws Exception {
        return p.client().newConsumer(schema).topic(topic).subscriptionName("s")
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe();
    }

    private static Object version(Message<?> message) {
        return message.getSchemaVersion() == null ? "none" : java.util.HexFormat.of().formatHex(message.getSchemaVersion());
    }

    public static Object textsAndNumbers(Program p) throws Exception {
        Map<String, Object> found = new LinkedHashMap<>();
        String topic = p.topic("text");
        producer(p, Schema.STRING, topic).send("ä");
        Message<String> text = p.next(consumer(p, Schema.STRING, topic));
        found.put("text", List.of(text.getValue(), version(text)));
        topic = p.topic("number");
        producer(p, Schema.INT64, topic).send(-5L);
        Message<Long> number = p.next(consumer(p, Schema.INT64, topic));
        found.put("number", List.of(number.getValue(), version(number)));
        return found;
    }

    public static Object recordsAsJsonAndAvro(Program p) throws Exception {
        Map<String, Object> found = new LinkedHashMap<>();
        for (Schema<User> schema : List.of(Schema.JSON(User.class), Schema.AVRO(User.class))) {
            String topic = p.topic(schema.getSchemaInfo().getType().name());
            producer(p, schema, topic).send(User.of("anna", 5));
            Message<User> message = p.next(consumer(p, schema, topic));
            var stored = p.admin("GET", "schemas/" + Program.path(topic).replace("persistent/", "") + "/schema", "");
            found.put(schema.getSchemaInfo().getType().name(),
                    List.of(message.getValue().toString(), version(message), stored.get("type").asText(), stored.get("version").asInt()));
        }
        return found;
    }

    public static Object consumersThatTakeWhatComes(Program p) throws Exception {
        String topic = p.topic();
        producer(p, Schema.AVRO(User.class), topic).send(User.of("anna", 5));
        Message<GenericRecord> message = p.next(consumer(p, Schema.AUTO_CONSUME(), topic));
        return List.of(message.getValue().getField("name").toString(), message.getValue().getField("age").toString(),
                message.getValue().getSchemaType().name());
    }

    public static Object producersThatSendWhatIsThere(Program p) throws Exception {
        String topic = p.topic();
        Schema<User> schema = Schema.AVRO(User.class);
        Consumer<User> consumer = consumer(p, schema, topic);
        Producer<byte[]> producer = producer(p, Schema.AUTO_PRODUCE_BYTES(), topic);
        producer.send(schema.encode(User.of("anna", 5)));
        String wrong = p.fails(() -> producer.send(new byte[] {1}));
        return List.of(p.next(consumer).getValue().toString(), wrong);
    }

    public static Object keysAndValues(Program p) throws Exception {
        Map<String, Object> found = new LinkedHashMap<>();
        for (KeyValueEncodingType type : KeyValueEncodingType.values()) {
            String topic = p.topic(type.name());
            Schema<KeyValue<String, User>> schema = Schema.KeyValue(Schema.STRING, Schema.JSON(User.class), type);
            producer(p, schema, topic).send(new KeyValue<>("k", User.of("anna", 5)));
            Message<KeyValue<String, User>> message = p.next(consumer(p, schema, topic));
            found.put(type.name(), List.of(message.getValue().getKey(), message.getValue().getValue().toString(), message.hasKey()));
        }
        return found;
    }

    public static Object schemasThatDoNotFit(Program p) throws Exception {
        String topic = p.topic();
        producer(p, Schema.AVRO(User.class), topic).send(User.of("anna", 5));
        return Program.map(
                "another type", p.fails(() -> producer(p, Schema.AVRO(Other.class), topic)),
                "another kind", p.fails(() -> producer(p, Schema.JSON(User.class), topic)),
                "bytes", p.fails(() -> producer(p, Schema.BYTES, topic)),
                "a consumer", p.fails(() -> consumer(p, Schema.AVRO(Other.class), topic)));
    }

    public static Object severalSchemasOfAProducer(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.client().newProducer().topic(topic).enableBatching(false).enableMultiSchema(true).create();
        producer.newMessage(Schema.AVRO(User.class)).value(User.of("anna", 5)).send();
        producer.newMessage(Schema.AVRO(User.class)).value(User.of("emil", 6)).send();
        Consumer<User> consumer = consumer(p, Schema.AVRO(User.class), topic);
        Message<User> first = p.next(consumer);
        Message<User> second = p.next(consumer);
        return List.of(first.getValue().toString(), version(first), second.getValue().toString(), version(second));
    }
}
