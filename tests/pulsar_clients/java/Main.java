import com.fasterxml.jackson.databind.ObjectMapper;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/**
 * Runs scenarios with Pulsar's Java client, and prints a line of JSON for each, as runner.py does.
 *
 * <p>A scenario is a public static method of a class of SCENARIOS that takes a Program and returns what it saw. Arguments:
 * the URL of the service, that of its administration, what tells this run from others, and names of scenarios (none: all).
 */
public final class Main {
    private static final List<Class<?>> SCENARIOS = List.of(
            Acknowledging.class, Consuming.class, Producing.class, Reading.class, Schemas.class, Subscribing.class, Topics.class);
    private static final int AT_ONCE = 8; // they mostly wait
    private static final long LIMIT_S = 90;

    public static void main(String[] arguments) throws Exception {
        List<String> names = Arrays.asList(arguments).subList(3, arguments.length);
        List<Method> chosen = SCENARIOS.stream()
                .flatMap(one -> Arrays.stream(one.getDeclaredMethods()))
                .filter(method -> Modifier.isPublic(method.getModifiers()))
                .filter(method -> Arrays.equals(method.getParameterTypes(), new Class<?>[] {Program.class}))
                .filter(method -> names.isEmpty() || names.contains(name(method)))
                .sorted(Comparator.comparing(Main::isFast).thenComparing(Method::getName))
                .toList();
        ExecutorService workers = Executors.newFixedThreadPool(AT_ONCE);
        List<Future<?>> running = new ArrayList<>();
        for (Method method : chosen) {
            Program program = new Program(name(method), arguments[2], arguments[0], arguments[1]);
            running.add(workers.submit(() -> print(run(method, program))));
        }
        for (Future<?> one : running) {
            one.get();
        }
        Runtime.getRuntime().halt(0); // threads of clients may wait for ever
    }

    private static boolean isFast(Method method) {
        return !method.isAnnotationPresent(Program.Slow.class);
    }

    private static Map<String, Object> run(Method method, Program program) {
        Map<String, Object> row = new LinkedHashMap<>();
        row.put("scenario", program.name);
        ExecutorService thread = Executors.newSingleThreadExecutor();
        try {
            row.put("seen", thread.submit(() -> method.invoke(null, program)).get(LIMIT_S, TimeUnit.SECONDS));
        } catch (TimeoutException error) {
            row.put("failed", "it does not end");
        } catch (Exception error) {
            Throwable cause = error;
            while (cause instanceof java.util.concurrent.ExecutionException || cause instanceof InvocationTargetException) {
                cause = cause.getCause();
            }
            String place = Arrays.stream(cause.getStackTrace())
                    .filter(at -> SCENARIOS.stream().anyMatch(one -> one.getName().equals(at.getClassName())))
                    .findFirst().map(StackTraceElement::toString).orElse("");
            row.put("failed", cause + " at " + place);
        }
        thread.shutdownNow();
        program.close();
        return row;
    }

    private static synchronized void print(Map<String, Object> row) {
        try {
            System.out.println(new ObjectMapper().writeValueAsString(row));
        } catch (Exception error) {
            throw new IllegalStateException(error);
        }
    }

    /** aReader becomes a_reader. */
    private static String name(Method method) {
        return method.getName().replaceAll("([A-Z])", "_$1").toLowerCase();
    }
}
