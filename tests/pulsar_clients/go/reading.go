package main

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

func from(id pulsar.MessageID, inclusive bool) func(*pulsar.ReaderOptions) {
	return func(options *pulsar.ReaderOptions) {
		options.StartMessageID = id
		options.StartMessageIDInclusive = inclusive
	}
}

func (Scenarios) AReaderFromTheEnds(p *Program) any {
	topic := p.topic("t")
	producer := p.producer(topic, nil)
	p.send(producer, "a", "b")
	latest := p.reader(topic, from(pulsar.LatestMessageID(), false))
	available := latest.HasNext()
	p.send(producer, "c")
	last := p.reader(topic, from(pulsar.LatestMessageID(), true))
	return []any{p.read(p.reader(topic, nil)), available, p.read(latest), p.read(last)}
}

func (Scenarios) AReaderFromAMessage(p *Program) any {
	topic := p.topic("t")
	p.send(p.producer(topic, nil), "a")
	producer := p.producer(topic, batching)
	p.sendAll(producer, texts("b", "c", "d")...)
	p.sendAll(producer, texts("e")...)
	all := p.reader(topic, nil)
	found := Seen{}
	for at := range 5 {
		id := sure(pulsar.DeserializeMessageID(sure(all.Next(context.Background())).ID().Serialize()))
		found[fmt.Sprint("after ", at)] = p.read(p.reader(topic, from(id, false)))
		found[fmt.Sprint("from ", at)] = p.read(p.reader(topic, from(id, true)))
	}
	return found
}

func (Scenarios) AReaderSeeks(p *Program) any {
	topic := p.topic("t")
	producer := p.producer(topic, nil)
	p.send(producer, "a", "b")
	time.Sleep(tenth)
	at := time.Now()
	time.Sleep(tenth)
	third := sure(producer.Send(context.Background(), text("c")))
	p.send(producer, "d")
	reader := p.reader(topic, nil)
	found := []any{p.read(reader)}
	must(reader.Seek(third))
	found = append(found, p.read(reader))
	must(reader.Seek(pulsar.EarliestMessageID()))
	found = append(found, p.read(reader))
	must(reader.SeekByTime(at))
	return append(found, p.read(reader), identified(sure(reader.GetLastMessageID()), topic))
}

func (p *Program) compact(topic string) {
	p.admin("PUT", path(topic)+"/compaction", "")
	until("it is compacted", func() bool {
		return p.admin("GET", path(topic)+"/compaction", "").(Seen)["status"] == "SUCCESS"
	})
}

func (Scenarios) ReadingCompacted(p *Program) any {
	topic := p.topic("t")
	producer := p.producer(topic, nil)
	p.sendAll(producer, keyed("a", "1"), keyed("b", "1"), keyed("a", "2"), keyed("c", "1"), keyed("b", ""))
	p.sendAll(p.producer(topic, batching), keyed("d", "1"), keyed("c", "2"), keyed("d", "2"))
	p.compact(topic)
	p.sendAll(producer, keyed("a", "3"))
	compacted := p.read(p.reader(topic, func(options *pulsar.ReaderOptions) { options.ReadCompacted = true }))
	consumer := p.consumer(topic, func(options *pulsar.ConsumerOptions) { options.ReadCompacted = true })
	return Seen{
		"reader": compacted, "consumer": p.receive(consumer, len(compacted)), "then": p.nothing(consumer),
		"plain": len(p.read(p.reader(topic, nil))),
	}
}

func (Scenarios) ATableView(p *Program) any {
	topic := p.partitioned(2)
	producer := p.producer(topic, func(options *pulsar.ProducerOptions) { options.Schema = pulsar.NewStringSchema(nil) })
	put := func(key, value string) {
		sure(producer.Send(context.Background(), &pulsar.ProducerMessage{Key: key, Value: value}))
	}
	put("a", "1")
	put("b", "1")
	put("a", "2")
	var text *string
	view := sure(p.client().CreateTableView(pulsar.TableViewOptions{
		Topic: topic, Schema: pulsar.NewStringSchema(nil), SchemaValueType: reflect.TypeOf(text),
	}))
	entries := func() map[string]string {
		found := map[string]string{}
		for key, value := range view.Entries() {
			found[key] = *value.(*string)
		}
		return found
	}
	first := entries()
	var listening sync.Mutex
	var listened []string
	must(view.ForEachAndListen(func(key string, value any) error {
		listening.Lock()
		defer listening.Unlock()
		listened = append(listened, key+" "+*value.(*string))
		return nil
	}))
	put("c", "1")
	until("the view follows", func() bool { return view.ContainsKey("c") })
	listening.Lock()
	defer listening.Unlock()
	slices.Sort(listened)
	return []any{first, entries(), listened}
}

const user = `{"type": "record", "name": "User", "namespace": "test", "fields":
	[{"name": "name", "type": "string"}, {"name": "age", "type": "int"}]}`
const other = `{"type": "record", "name": "User", "namespace": "test", "fields":
	[{"name": "name", "type": "string"}, {"name": "age", "type": "string"}]}`

// User is a record.
type User struct {
	Name string `json:"name" avro:"name"`
	Age  int    `json:"age" avro:"age"`
}

func withSchema(schema pulsar.Schema) func(*pulsar.ProducerOptions) {
	return func(options *pulsar.ProducerOptions) { options.Schema = schema }
}

func (Scenarios) RecordsAsJsonAndAvro(p *Program) any {
	found := Seen{}
	for name, schema := range map[string]pulsar.Schema{
		"json": pulsar.NewJSONSchema(user, nil), "avro": pulsar.NewAvroSchema(user, nil),
	} {
		topic := p.topic(name)
		producer := p.producer(topic, withSchema(schema))
		sure(producer.Send(context.Background(), &pulsar.ProducerMessage{Value: User{"anna", 5}}))
		consumer := p.consumer(topic, func(options *pulsar.ConsumerOptions) { options.Schema = schema })
		message := next(consumer, 1)[0]
		var got User
		must(message.GetSchemaValue(&got))
		found[name] = []any{got, fmt.Sprintf("%x", message.SchemaVersion())}
	}
	return found
}

func (Scenarios) SchemasThatDoNotFit(p *Program) any {
	topic := p.topic("t")
	p.producer(topic, withSchema(pulsar.NewAvroSchema(user, nil)))
	return Seen{
		"another type": fails(p.produce(p.client(), topic, withSchema(pulsar.NewAvroSchema(other, nil)))),
		"another kind": fails(p.produce(p.client(), topic, withSchema(pulsar.NewJSONSchema(user, nil)))),
		"a consumer": fails(p.consume(p.client(), topic, func(options *pulsar.ConsumerOptions) {
			options.Schema = pulsar.NewAvroSchema(other, nil)
		})),
	}
}
