package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	"github.com/apache/pulsar-client-go/pulsar/log"
	"github.com/sirupsen/logrus"
)

const (
	wait     = 20 * time.Second       // for what must come
	nothing  = 300 * time.Millisecond // for what must not
	aMinute  = time.Minute
	longest  = 200 // of a payload that stands in a trace as it is
	aMoment  = 50 * time.Millisecond
	tenth    = 100 * time.Millisecond
	ofAnHour = time.Hour
)

// Seen is what a scenario saw, by name.
type Seen = map[string]any

// ID is of a message; Python makes an ordinal of it.
type ID struct {
	Topic      string `json:"topic"`
	Partition  int32  `json:"partition"`
	Ledger     int64  `json:"ledger"`
	Entry      int64  `json:"entry"`
	BatchIndex int32  `json:"batch_index"`
}

// Program is one scenario: clients, names of its own, and the means to say what it saw; program.py has the same for Python.
type Program struct {
	name, unique, run, url, http string
	once                         sync.Once
	shared                       pulsar.Client
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func sure[T any](value T, err error) T {
	must(err)
	return value
}

func (p *Program) open(settings func(*pulsar.ClientOptions)) (pulsar.Client, error) {
	quiet := logrus.New()
	quiet.SetOutput(io.Discard)
	options := pulsar.ClientOptions{URL: p.url, Logger: log.NewLoggerWithLogrus(quiet), OperationTimeout: wait}
	settings(&options)
	return pulsar.NewClient(options)
}

func (p *Program) newClient() pulsar.Client { return sure(p.open(func(*pulsar.ClientOptions) {})) }

func (p *Program) client() pulsar.Client {
	p.once.Do(func() { p.shared = p.newClient() })
	return p.shared
}

// A topic of this scenario alone.
func (p *Program) topic(name string) string {
	return "persistent://public/default/" + p.unique + "-" + name
}

func (p *Program) partitioned(count int) string {
	p.admin("PUT", path(p.topic("t"))+"/partitions", fmt.Sprint(count))
	return p.topic("t")
}

// A namespace of this scenario alone; policy is set to value.
func (p *Program) namespace(policy, value string) string {
	namespace := "public/" + p.unique
	p.admin("PUT", "namespaces/"+namespace, "{}")
	p.admin("POST", "namespaces/"+namespace+"/"+policy, value)
	return namespace
}

func path(topic string) string { return strings.Replace(topic, "://", "/", 1) }

func (p *Program) admin(method, path, body string) any {
	request := sure(http.NewRequest(method, p.http+"/admin/v2/"+path, strings.NewReader(body)))
	request.Header.Set("Content-Type", "application/json")
	answer := sure(http.DefaultClient.Do(request))
	defer answer.Body.Close()
	text := sure(io.ReadAll(answer.Body))
	if answer.StatusCode >= 300 {
		panic(fmt.Sprintf("%s %s: %d %s", method, path, answer.StatusCode, text))
	}
	var found any
	if len(text) > 0 {
		must(json.Unmarshal(text, &found))
	}
	return found
}

// What the figures of a topic have at a path of names.
func (p *Program) stats(topic string, names ...string) any {
	found := p.admin("GET", path(topic)+"/stats", "")
	for _, name := range names {
		found = found.(Seen)[name]
	}
	return found
}

func (p *Program) backlog(topic string) int {
	return int(p.stats(topic, "subscriptions", "s", "msgBacklog").(float64))
}

// Settings may be nil.
func (p *Program) producer(topic string, settings func(*pulsar.ProducerOptions)) pulsar.Producer {
	return sure(p.produce(p.client(), topic, settings))
}

func (p *Program) produce(client pulsar.Client, topic string, settings func(*pulsar.ProducerOptions)) (pulsar.Producer, error) {
	options := pulsar.ProducerOptions{Topic: topic, DisableBatching: true}
	if settings != nil {
		settings(&options)
	}
	return client.CreateProducer(options)
}

// Its batches end with a flush.
func batching(options *pulsar.ProducerOptions) {
	options.DisableBatching = false
	options.BatchingMaxPublishDelay = aMinute
}

func (p *Program) consumer(topic string, settings func(*pulsar.ConsumerOptions)) pulsar.Consumer {
	return sure(p.consume(p.client(), topic, settings))
}

// From the earliest message on.
func (p *Program) consume(client pulsar.Client, topic string, settings func(*pulsar.ConsumerOptions)) (pulsar.Consumer, error) {
	options := pulsar.ConsumerOptions{
		Topic: topic, SubscriptionName: "s", SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest,
	}
	if settings != nil {
		settings(&options)
	}
	return client.Subscribe(options)
}

func ofType(kind pulsar.SubscriptionType) func(*pulsar.ConsumerOptions) {
	return func(options *pulsar.ConsumerOptions) { options.Type = kind }
}

func (p *Program) reader(topic string, settings func(*pulsar.ReaderOptions)) pulsar.Reader {
	options := pulsar.ReaderOptions{Topic: topic, StartMessageID: pulsar.EarliestMessageID()}
	if settings != nil {
		settings(&options)
	}
	return sure(p.client().CreateReader(options))
}

func text(content string) *pulsar.ProducerMessage {
	return &pulsar.ProducerMessage{Payload: []byte(content)}
}

func keyed(key, content string) *pulsar.ProducerMessage {
	return &pulsar.ProducerMessage{Key: key, Payload: []byte(content)}
}

func numbered(prefix string, count int) []string {
	found := make([]string, count)
	for at := range found {
		found[at] = fmt.Sprintf("%s%03d", prefix, at)
	}
	return found
}

func (p *Program) send(producer pulsar.Producer, contents ...string) []ID {
	var ids []ID
	for _, content := range contents {
		ids = append(ids, identified(sure(producer.Send(context.Background(), text(content))), producer.Topic()))
	}
	return ids
}

// Without waiting in between; ends with a flush. An error's name where one was not stored.
func (p *Program) sendAll(producer pulsar.Producer, messages ...*pulsar.ProducerMessage) []any {
	answers := make([]any, len(messages))
	var waiting sync.WaitGroup
	for at, message := range messages {
		waiting.Add(1)
		producer.SendAsync(context.Background(), message, func(id pulsar.MessageID, _ *pulsar.ProducerMessage, err error) {
			if answers[at] = errorName(err); err == nil {
				answers[at] = identified(id, producer.Topic())
			}
			waiting.Done()
		})
	}
	must(producer.Flush())
	waiting.Wait()
	return answers
}

func texts(contents ...string) []*pulsar.ProducerMessage {
	var found []*pulsar.ProducerMessage
	for _, content := range contents {
		found = append(found, text(content))
	}
	return found
}

func receiveWithin(limit time.Duration, consumer pulsar.Consumer) (pulsar.Message, error) {
	within, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return consumer.Receive(within)
}

func next(consumer pulsar.Consumer, count int) []pulsar.Message {
	var found []pulsar.Message
	for range count {
		message, err := receiveWithin(wait, consumer)
		if err != nil {
			panic(fmt.Sprintf("%d of %d messages came: %v", len(found), count, err))
		}
		found = append(found, message)
	}
	return found
}

// The next messages, acknowledged.
func (p *Program) receive(consumer pulsar.Consumer, count int) []any {
	var found []any
	for range count {
		message := next(consumer, 1)[0]
		found = append(found, p.seen(message))
		must(consumer.Ack(message))
	}
	return found
}

// Their contents alone.
func contents(consumer pulsar.Consumer, count int) []string {
	var found []string
	for range count {
		message := next(consumer, 1)[0]
		found = append(found, shown(message.Payload()))
		must(consumer.Ack(message))
	}
	return found
}

func sorted(found []string) []string {
	slices.Sort(found)
	return found
}

// What each got, until they have so many messages together.
func drained(consumers []pulsar.Consumer, count int) [][]pulsar.Message {
	got := make([][]pulsar.Message, len(consumers))
	deadline := time.Now().Add(wait)
	for found := 0; found < count; {
		for at, consumer := range consumers {
			for {
				message, err := receiveWithin(aMoment, consumer)
				if err != nil {
					break
				}
				must(consumer.Ack(message))
				got[at] = append(got[at], message)
				found++
			}
		}
		if time.Now().After(deadline) {
			panic(fmt.Sprintf("%d of %d messages came", found, count))
		}
	}
	return got
}

func (p *Program) nothing(consumer pulsar.Consumer) any {
	if message, err := receiveWithin(nothing, consumer); err == nil {
		return p.seen(message)
	}
	return "nothing"
}

// All that the reader says to be available.
func (p *Program) read(reader pulsar.Reader) []any {
	found := []any{}
	for reader.HasNext() {
		within, cancel := context.WithTimeout(context.Background(), wait)
		message, err := reader.Next(within)
		cancel()
		if err != nil {
			return append(found, "one is said to be available")
		}
		found = append(found, p.seen(message))
	}
	return found
}

func until(what string, condition func() bool) {
	for deadline := time.Now().Add(wait); !condition(); time.Sleep(aMoment) {
		if time.Now().After(deadline) {
			panic("it did not come to be that " + what)
		}
	}
}

var ofServer = regexp.MustCompile(`server error: (\w+)`)

// What the server called it, else what the client does.
func errorName(err error) string {
	if err == nil {
		return "no error"
	}
	if found := ofServer.FindStringSubmatch(err.Error()); found != nil {
		return found[1]
	}
	var known *pulsar.Error
	if errors.As(err, &known) {
		parts := strings.Split(known.Error(), ": ")
		return parts[len(parts)-1]
	}
	return err.Error()
}

func fails[T any](_ T, err error) string { return errorName(err) }

var ofPartition = regexp.MustCompile(`-partition-\d+$`)

func identified(id pulsar.MessageID, topic string) ID {
	if id.PartitionIdx() >= 0 {
		topic = ofPartition.ReplaceAllString(topic, "")
	}
	return ID{topic, id.PartitionIdx(), id.LedgerID(), id.EntryID(), id.BatchIdx()}
}

func (p *Program) seen(message pulsar.Message) Seen {
	found := Seen{"data": shown(message.Payload()), "id": identified(message.ID(), message.Topic())}
	if len(message.Properties()) > 0 {
		found["properties"] = message.Properties()
	}
	if message.Key() != "" {
		found["key"] = message.Key()
	}
	if message.OrderingKey() != "" {
		found["ordering_key"] = message.OrderingKey()
	}
	if message.EventTime().UnixMilli() > 0 {
		found["event"] = message.EventTime().UnixMilli()
	}
	if message.RedeliveryCount() > 0 {
		found["redelivered"] = message.RedeliveryCount()
	}
	return found
}

func shown(data []byte) string {
	if len(data) <= longest {
		return string(data)
	}
	return fmt.Sprintf("%d bytes, %x", len(data), sha256.Sum256(data))[:32]
}

// A text without what is unique to this run.
func (p *Program) plain(text string) string { return strings.ReplaceAll(text, p.unique+"-", "") }
