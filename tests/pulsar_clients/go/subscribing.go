package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/apache/pulsar-client-go/pulsar"
)

func (Scenarios) ExclusiveIsForOne(p *Program) any {
	topic := p.topic("t")
	first := p.consumer(topic, nil)
	same := fails(p.consume(p.client(), topic, nil))
	other := fails(p.consume(p.newClient(), topic, nil))
	p.send(p.producer(topic, nil), "a")
	got := p.receive(first, 1)
	first.Close()
	return Seen{
		"same client": same, "other client": other, "got": got, "afterwards": fails(p.consume(p.newClient(), topic, nil)),
	}
}

func payloads(messages []pulsar.Message) []string {
	var found []string
	for _, message := range messages {
		found = append(found, shown(message.Payload()))
	}
	return found
}

func (Scenarios) SharedGivesEachMessageOnce(p *Program) any {
	topic := p.topic("t")
	var consumers []pulsar.Consumer
	for range 3 {
		consumers = append(consumers, sure(p.consume(p.newClient(), topic, func(options *pulsar.ConsumerOptions) {
			options.Type = pulsar.Shared
			options.ReceiverQueueSize = 10
		})))
	}
	sent := numbered("", 90)
	p.sendAll(p.producer(topic, nil), texts(sent...)...)
	var all []string
	some, ordered := true, true
	for _, got := range drained(consumers, 90) {
		some = some && len(got) > 0
		ordered = ordered && slices.IsSorted(payloads(got))
		all = append(all, payloads(got)...)
	}
	return Seen{"all": slices.Equal(sorted(all), sent), "each got some": some, "in order": ordered}
}

func (Scenarios) SharedGivesBackWhatWasNotAcknowledged(p *Program) any {
	topic := p.topic("t")
	first := p.consumer(topic, ofType(pulsar.Shared))
	p.send(p.producer(topic, nil), "a", "b", "c", "d")
	must(first.Ack(next(first, 4)[1]))
	until("one is acknowledged", func() bool { return p.backlog(topic) == 3 })
	second := sure(p.consume(p.newClient(), topic, ofType(pulsar.Shared)))
	first.Close()
	return []any{p.receive(second, 3), p.nothing(second)}
}

// Which of them is active depends on the name of the topic.
func (Scenarios) FailoverHasOneAfterAnother(p *Program) any {
	topic := p.topic("t")
	consumers := map[string]pulsar.Consumer{}
	active := func() string { return p.stats(topic, "subscriptions", "s", "activeConsumerName").(string) }
	for _, name := range []string{"a", "b"} {
		consumers[name] = sure(p.consume(p.newClient(), topic, func(options *pulsar.ConsumerOptions) {
			options.Type = pulsar.Failover
			options.Name = name
		}))
	}
	until("one is active", func() bool { return active() != "" })
	p.send(p.producer(topic, nil), "1", "2")
	first := consumers[active()]
	must(first.Ack(next(first, 1)[0]))
	until("one is acknowledged", func() bool { return p.backlog(topic) == 1 })
	before := first.Name()
	first.Close()
	until("the other one is active", func() bool { return active() != before })
	return p.receive(consumers[active()], 1)
}

func (p *Program) keyShared(topic string, ranges ...int) (pulsar.Consumer, error) {
	return p.consume(p.newClient(), topic, func(options *pulsar.ConsumerOptions) {
		options.Type = pulsar.KeyShared
		if len(ranges) > 0 {
			options.KeySharedPolicy = &pulsar.KeySharedPolicy{Mode: pulsar.KeySharedPolicyModeSticky, HashRanges: ranges}
		}
	})
}

func (Scenarios) KeySharedKeepsTheOrderOfAKey(p *Program) any {
	topic := p.topic("t")
	var consumers []pulsar.Consumer
	for range 3 {
		consumers = append(consumers, sure(p.keyShared(topic)))
	}
	producer := p.producer(topic, func(options *pulsar.ProducerOptions) {
		options.DisableBatching = false
		options.BatcherBuilderType = pulsar.KeyBasedBatchBuilder
	})
	var messages []*pulsar.ProducerMessage
	for at, content := range numbered("", 200) {
		messages = append(messages, keyed(fmt.Sprint("k", at%20), content))
	}
	p.sendAll(producer, messages...)
	last, owner := map[string]string{}, map[string]int{}
	ordered, one := true, true
	for at, got := range drained(consumers, 200) {
		for _, message := range got {
			before, known := owner[message.Key()]
			one = one && (!known || before == at)
			ordered = ordered && last[message.Key()] < shown(message.Payload())
			last[message.Key()], owner[message.Key()] = shown(message.Payload()), at
		}
	}
	return Seen{"in order": ordered, "keys": len(owner), "one consumer a key": one}
}

func (Scenarios) StickyRanges(p *Program) any {
	topic := p.topic("t")
	consumers := []pulsar.Consumer{sure(p.keyShared(topic, 0, 32767)), sure(p.keyShared(topic, 32768, 65535))}
	var messages []*pulsar.ProducerMessage
	for at := range 20 {
		messages = append(messages, keyed(fmt.Sprint("k", at), fmt.Sprint("k", at)))
	}
	messages = append(messages, &pulsar.ProducerMessage{Key: "k0", OrderingKey: "k1", Payload: []byte("ordered")})
	p.sendAll(p.producer(topic, nil), messages...)
	var found [][]string
	for _, got := range drained(consumers, len(messages)) {
		found = append(found, payloads(got))
	}
	return found
}

func (Scenarios) StickyRangesThatOverlap(p *Program) any {
	topic := p.topic("t")
	sure(p.keyShared(topic, 0, 32767))
	return Seen{
		"overlapping": fails(p.keyShared(topic, 32767, 40000)), "the rest": fails(p.keyShared(topic, 32768, 65535)),
	}
}

func (Scenarios) TypesThatDoNotGoTogether(p *Program) any {
	found := Seen{}
	kinds := map[string]pulsar.SubscriptionType{
		"exclusive": pulsar.Exclusive, "shared": pulsar.Shared, "failover": pulsar.Failover, "key shared": pulsar.KeyShared,
	}
	for one, first := range kinds {
		topic := p.topic(strings.ReplaceAll(one, " ", "-"))
		p.consumer(topic, ofType(first))
		for other, second := range kinds {
			if one != other {
				found[one+", "+other] = fails(p.consume(p.client(), topic, ofType(second)))
			}
		}
	}
	return found
}

func (Scenarios) Unsubscribing(p *Program) any {
	topic := p.topic("t")
	first := p.consumer(topic, ofType(pulsar.Shared))
	second := sure(p.consume(p.newClient(), topic, ofType(pulsar.Shared)))
	beside := errorName(first.Unsubscribe())
	second.Close()
	alone := errorName(first.Unsubscribe())
	return Seen{"beside another": beside, "alone": alone, "left": p.stats(topic, "subscriptions")}
}

func (Scenarios) UnsubscribingByForce(p *Program) any {
	topic := p.topic("t")
	first := p.consumer(topic, ofType(pulsar.Shared))
	sure(p.consume(p.newClient(), topic, ofType(pulsar.Shared)))
	return errorName(first.UnsubscribeForce())
}

func (Scenarios) ASubscriptionThatDoesNotLast(p *Program) any {
	topic := p.topic("t")
	consumer := p.consumer(topic, func(options *pulsar.ConsumerOptions) { options.SubscriptionMode = pulsar.NonDurable })
	p.send(p.producer(topic, nil), "a", "b")
	got := p.receive(consumer, 2)
	durable := p.stats(topic, "subscriptions", "s", "durable")
	consumer.Close()
	until("it is gone", func() bool { return len(p.stats(topic, "subscriptions").(Seen)) == 0 })
	return Seen{"got": got, "durable": durable}
}

func (Scenarios) PropertiesOfASubscription(p *Program) any {
	topic := p.topic("t")
	p.consumer(topic, func(options *pulsar.ConsumerOptions) {
		options.SubscriptionProperties = map[string]string{"x": "1"}
		options.Properties = map[string]string{"of": "the consumer"}
		options.Name = "anna"
	})
	subscription := p.stats(topic, "subscriptions", "s").(Seen)
	consumer := subscription["consumers"].([]any)[0].(Seen)
	return []any{subscription["subscriptionProperties"], consumer["metadata"], consumer["consumerName"]}
}

func (Scenarios) PropertiesOfASubscriptionThatIsThere(p *Program) any {
	topic := p.topic("t")
	found := []any{}
	for _, properties := range []map[string]string{{"x": "1", "u": "ü"}, {"x": "2"}, {"y": "3"}, nil} {
		p.consumer(topic, func(options *pulsar.ConsumerOptions) { options.SubscriptionProperties = properties }).Close()
		found = append(found, p.stats(topic, "subscriptions", "s", "subscriptionProperties"))
	}
	return found
}
